"""What do people look at? Tables, Gantt charts, traces, plots."""
