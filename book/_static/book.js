// Folded tables: a click on a head sorts by its column, a text above the table keeps the rows that hold all its words.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("details.folded table")) {
    const rows = [...table.tBodies[0].rows];
    const filter = document.createElement("input");
    filter.type = "search";
    filter.placeholder = "filter rows";
    filter.setAttribute("aria-label", "Keep the rows that hold all of these words");
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/);
      for (const row of rows) {
        const cells = [...row.cells].map((cell) => cell.textContent.toLowerCase());
        row.hidden = !words.every((word) => cells.some((cell) => cell.includes(word)));
      }
    });
    table.before(filter);
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.ariaSort === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.ariaSort = down ? "descending" : "ascending";
        table.tBodies[0].append(...rows.sort((a, b) => (down ? -1 : 1) * compare(a, b, column)));
      });
    });
  }

  // roles that screen readers no longer know, or that lack their children
  for (const item of document.querySelectorAll(".citation-list, .citation")) item.removeAttribute("role");
  // names that are not what is read on the button
  for (const button of document.querySelectorAll("summary, .theme-switch-button, .search-button-field"))
    button.removeAttribute("aria-label");
  addEventListener("load", () => {
    for (const figure of document.querySelectorAll("div.cell_output figure"))
      if (figure.scrollWidth > figure.clientWidth) figure.tabIndex = 0; // for those who scroll by keys
  });

  function compare(a, b, column) {
    const [x, y] = [a, b].map((row) => row.cells[column].textContent);
    const [p, q] = [x, y].map((text) => parseFloat(text.replaceAll(",", "").replace("−", "-")));
    if (isNaN(p) !== isNaN(q)) return isNaN(p) ? 1 : -1; // words, such as OOM, after numbers
    return isNaN(p) ? x.localeCompare(y) : p - q || x.localeCompare(y);
  }
});
