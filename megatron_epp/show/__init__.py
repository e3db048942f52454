"""Pictures of plans and iterations: text, SVG, PNG, HTML, traces and tables."""
