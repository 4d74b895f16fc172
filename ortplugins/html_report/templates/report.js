// SPDX-License-Identifier: MIT
"use strict";
// The tables stand without this; it adds filters and sorting.
function cellKey(cell) {
  const number = cell.querySelector("data");
  if (!number) return cell.textContent.trim().toLowerCase();
  return Number.isNaN(Number(number.value)) ? Infinity : Number(number.value);
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const descends = head.getAttribute("aria-sort") !== "descending" &&
        (head.getAttribute("aria-sort") === "ascending" || head.classList.contains("n"));
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descends ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].map((row) => [cellKey(row.cells[column]), row]);
      rows.sort(([a], [b]) => {
        const both = typeof a === "number" && typeof b === "number";
        const order = both ? (a === b ? 0 : a - b) : String(a).localeCompare(String(b), "en", { numeric: true });
        return descends ? -order : order;
      });
      table.tBodies[0].append(...rows.map(([, row]) => row));
    });
  });
}

const filters = document.querySelector(".filters");
if (filters) {
  const rows = [...document.querySelectorAll(".remarks tbody tr")];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const { text, pass, outcome, shown } = filters.elements;
  const update = () => {
    const wanted = text.value.trim().toLowerCase();
    let rowsShown = 0;
    rows.forEach((row, index) => {
      const fits = (!pass.value || row.dataset.pass === pass.value) &&
        (!outcome.value || row.dataset.outcome === outcome.value) &&
        texts[index].includes(wanted);
      row.hidden = !fits;
      if (fits) rowsShown += 1;
    });
    shown.value = `${rowsShown} of ${rows.length} remarks`;
  };
  filters.addEventListener("input", update);
  filters.addEventListener("submit", (event) => event.preventDefault());
  filters.hidden = false;
  update();
}
