"""Pictures of plans and of their runs: text, SVG, PNG, HTML, traces, tables."""
