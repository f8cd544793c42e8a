// A code block or a table that scrolls must be reachable by the keyboard.
const boxes = "pre > code, .md-typeset__scrollwrap";
const reach = () => document.querySelectorAll(boxes).forEach((box) => { box.tabIndex = 0; });
reach();
document.addEventListener("DOMContentLoaded", reach);
