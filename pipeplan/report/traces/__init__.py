"""What do traces for ui.perfetto.dev have?"""
