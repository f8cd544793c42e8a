"""HTML pages: typed blocks, templates, one style sheet, and charts as inline SVG."""
