"""What people look at: tables, Gantt charts, traces, plots."""
