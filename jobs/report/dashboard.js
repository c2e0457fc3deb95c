// Filters and sorts the table of runs. Both survive a refresh of the page, and a visit to a run's page.
"use strict";
(() => {
  const STORED = "trainyard-runs";
  const body = document.querySelector("#runs");
  const inputs = ["text", "state", "team"].map((id) => document.getElementById(id));
  const buttons = [...document.querySelectorAll("button[data-column]")];
  let chosen = { column: buttons.length - 1, descending: false };  // the newest first

  const value = (row, column) => {
    const cell = row.cells[column];
    if (!("v" in cell.dataset)) return cell.textContent;
    return cell.dataset.v === "" ? null : Number(cell.dataset.v);
  };

  // Rows without a value come last in both orders.
  function compare(one, other) {
    const [a, b] = [one, other].map((row) => value(row, chosen.column));
    if (a === null || b === null) return (a === null) - (b === null);
    const order = typeof a === "number" ? a - b : a.localeCompare(b);
    return chosen.descending ? -order : order;
  }

  function apply() {
    const [text, state, team] = inputs.map((input) => input.value);
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...body.rows];
    let shown = 0;
    for (const row of rows) {
      const content = row.textContent.toLowerCase();
      row.hidden = Boolean((state && row.dataset.state !== state) || (team && row.dataset.team !== team)
        || words.some((word) => !content.includes(word)));
      shown += !row.hidden;
    }
    body.append(...rows.sort(compare));
    for (const button of buttons) {
      const sorted = Number(button.dataset.column) === chosen.column;
      button.parentElement.ariaSort = sorted ? (chosen.descending ? "descending" : "ascending") : null;
    }
    const all = `${rows.length.toLocaleString("en")} ${rows.length === 1 ? "run" : "runs"}`;
    document.querySelector("#count").textContent = shown === rows.length ? all : `${shown.toLocaleString("en")} of ${all}`;
  }

  function store() {
    sessionStorage.setItem(STORED, JSON.stringify({ chosen, values: inputs.map((input) => input.value) }));
  }

  for (const button of buttons) {
    button.addEventListener("click", () => {
      const column = Number(button.dataset.column);
      const isNumber = body.rows.length > 0 && "v" in body.rows[0].cells[column].dataset;
      chosen = { column, descending: chosen.column === column ? !chosen.descending : isNumber };  // the largest first
      store();
      apply();
    });
  }
  for (const input of inputs) input.addEventListener("input", () => { store(); apply(); });
  document.addEventListener("updated", apply);

  const stored = JSON.parse(sessionStorage.getItem(STORED) || "null");
  if (stored) {
    chosen = stored.chosen;
    inputs.forEach((input, number) => { input.value = stored.values[number]; });
    // A team or state that is gone would hide all runs.
    inputs.forEach((input) => { if (input.selectedIndex === -1) input.selectedIndex = 0; });
  }
  apply();
})();
