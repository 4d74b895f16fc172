// Names the search for screen readers, and lets the keyboard scroll what is wider than the page.
addEventListener("load", () => {
  document.querySelector(".md-search").setAttribute("aria-label", "Search");
  for (const wide of document.querySelectorAll("pre, .md-typeset__scrollwrap")) wide.tabIndex = 0;
});
