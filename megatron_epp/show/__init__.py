"""Pictures of plans and of measured iterations: text, SVG, PNG, HTML, traces and tables."""
