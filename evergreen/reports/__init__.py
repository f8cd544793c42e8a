"""Every page that this project draws: typed parts, templates, one style sheet, charts as inline SVG, no script."""
