"""Charts as inline SVG, for every page that this project writes: no script, no network, readable on a phone."""
