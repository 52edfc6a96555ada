"use strict";
// Everything can be read without this script; it sorts tables, filters the maps, and opens what is folded for printing.
(() => {
  const all = (query, root = document) => [...root.querySelectorAll(query)];

  for (const button of all("[data-sort]")) {
    button.disabled = false;
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const table = button.closest("table");
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of all("th", table.tHead)) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[head.cellIndex].dataset.by ?? row.cells[head.cellIndex].textContent;
      const compare = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === "" || y === "") return (x === "") - (y === "");  // nothing measured: always last
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return down ? -order : order;
      };
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
    });
  }

  const form = document.querySelector(".filters");
  if (form) {
    const fields = all("[data-filter]", form);
    const rows = all("tr[data-map]");
    const apply = () => {
      let shown = 0;
      for (const row of rows) {
        const good = fields.every((field) => {
          if (!field.value.trim()) return true;
          if (field.dataset.filter !== "text") return row.dataset[field.dataset.filter] === field.value;
          return field.value.toLowerCase().split(/\s+/).every((word) => row.dataset.text.includes(word));
        });
        row.hidden = !good;
        document.getElementById(row.dataset.map).hidden = !good;
        shown += good;
      }
      for (const card of all(".maps")) {
        const article = card.closest("article");
        article.hidden = all("figure", card).every((figure) => figure.hidden);
        document.querySelector(`.sheet a[href="#${article.id}"]`).parentElement.hidden = article.hidden;
      }
      form.querySelector("output").textContent = `${shown} of ${rows.length} maps`;
    };
    form.hidden = false;
    form.addEventListener("input", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", (event) => {
      event.preventDefault();  // the browser would clear the fields only after this event
      for (const field of fields) field.value = "";
      apply();
    });
    apply();  // a browser that reloads keeps what was filled in
  }

  let opened = [];
  addEventListener("beforeprint", () => {
    const folded = all("details:not([open])");
    for (const part of folded) part.open = true;
    opened.push(...folded);  // some browsers announce a print twice
  });
  addEventListener("afterprint", () => {
    for (const part of opened) part.open = false;
    opened = [];
  });
})();
