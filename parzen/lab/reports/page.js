"use strict";
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const make = (tag, properties, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
// What is in ``element`` becomes a button.
const press = (element, action) => {
  const button = make("button", { type: "button" }, ...element.childNodes);
  button.addEventListener("click", action);
  element.append(button);
  return button;
};

// A header sorts its table: columns of numbers by value, others by name; what is no number comes last.
for (const head of all(".sorts thead th")) press(head, () => {
  const down = head.getAttribute("aria-sort") === "ascending", sign = down ? -1 : 1;
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const text = row => row.cells[head.cellIndex].textContent;
  const value = row => parseFloat(text(row).replaceAll(",", "").replace("−", "-"));
  const names = (a, b) => sign * text(a).localeCompare(text(b), "en", { numeric: true });
  const numbers = (a, b) => {
    const x = value(a), y = value(b);
    return isNaN(x) || isNaN(y) ? isNaN(x) - isNaN(y) : sign * (x - y);
  };
  const body = head.closest("table").tBodies[0];
  body.append(...[...body.rows].sort(head.classList.contains("n") ? numbers : names));
});

// An entry of a legend hides its curves in all charts of the figure, and shows where they are.
for (const figure of all(".charts")) {
  const legend = figure.querySelector(".legend"), buttons = [];
  const curves = k => all(`.series[data-k="${k}"]`, figure);
  const show = (button, shown) => {
    button.ariaPressed = shown;
    for (const curve of curves(button.parentElement.dataset.k)) curve.classList.toggle("off", !shown);
    every.textContent = buttons.some(b => b.ariaPressed === "true") ? "Hide all" : "Show all";
  };
  const light = (k, lit) => {
    figure.classList.toggle("dim", lit);
    for (const curve of curves(k)) curve.classList.toggle("lit", lit);
  };
  const every = make("button", { type: "button", textContent: "Hide all" });
  every.addEventListener("click", () => {
    const shown = every.textContent === "Show all";
    for (const button of buttons) show(button, shown);
  });
  for (const entry of legend.children) {
    const button = press(entry, () => show(button, button.ariaPressed !== "true"));
    button.ariaPressed = true;
    buttons.push(button);
    for (const name of ["pointerenter", "focus"]) button.addEventListener(name, () => light(entry.dataset.k, true));
    for (const name of ["pointerleave", "blur"]) button.addEventListener(name, () => light(entry.dataset.k, false));
  }
  if (buttons.length > 2) legend.append(make("li", {}, every));
}

// A figure shows the row of its table that is nearest to the pointer; arrow keys go from row to row.
for (const plot of all(".plot")) {
  const svg = plot.querySelector("svg"), mark = svg.querySelector(".mark"), flat = plot.dataset.along === "x";
  const table = plot.parentElement.querySelector(".values table"), rows = [...table.tBodies[0].rows];
  if (!rows.length) continue;
  const heads = [...table.tHead.rows[0].cells], places = rows.map(row => Number(row.dataset.at));
  const readout = make("div", { className: "readout", hidden: true });
  readout.setAttribute("aria-hidden", "true");
  plot.append(readout);
  plot.tabIndex = 0;
  plot.role = "slider";
  plot.ariaLabel = svg.ariaLabel;
  plot.ariaOrientation = flat ? "horizontal" : "vertical";
  plot.ariaValueMin = 0;
  plot.ariaValueMax = rows.length - 1;
  svg.ariaHidden = true;
  let at = rows.length - 1;

  const entries = row => {
    const found = heads.slice(1).map((head, i) => ({
      name: head.textContent, text: row.cells[i + 1].textContent, k: head.dataset.k,
      curve: head.dataset.k && svg.querySelector(`.series[data-k="${head.dataset.k}"]`),
    }));
    if (!found.some(entry => entry.curve)) return found;
    // As the curves lie, from top to bottom.
    return found.filter(e => e.text !== "—" && !e.curve.classList.contains("off"))
      .sort((a, b) => parseFloat(b.text) - parseFloat(a.text));
  };
  const describe = () => {
    const row = rows[at], title = `${heads[0].textContent}: ${row.cells[0].textContent}`, found = entries(row);
    plot.ariaValueNow = at;
    plot.ariaValueText = [title, ...found.map(entry => `${entry.name} ${entry.text}`)].join("; ");
    readout.replaceChildren(make("b", { textContent: title }), ...found.map(entry => {
      const line = make("div", {}, make("span", { textContent: entry.name }), " ", make("span", { textContent: entry.text }));
      if (entry.curve) line.prepend(plot.closest("figure").querySelector(`.legend [data-k="${entry.k}"] svg`).cloneNode(true));
      return line;
    }));
  };
  const show = i => {
    at = Math.max(0, Math.min(rows.length - 1, i));
    describe();
    mark.setAttribute("transform", flat ? `translate(${places[at]} 0)` : `translate(0 ${places[at]})`);
    // Beside what it speaks of.
    readout.classList.toggle("left", flat && places[at] > svg.viewBox.baseVal.width / 2);
    plot.classList.add("marked");
    readout.hidden = false;
  };
  const hide = () => {
    plot.classList.remove("marked");
    readout.hidden = true;
  };
  const point = event => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    const x = view.x + (event.clientX - box.left) / box.width * view.width;
    const y = view.y + (event.clientY - box.top) / box.height * view.height;
    // A row of a map has its middle half a cell further down.
    const far = places.map(place => Math.abs(flat ? place - x : place + 6 - y));
    show(far.indexOf(Math.min(...far)));
  };
  const steps = { ArrowRight: 1, ArrowUp: flat ? 1 : -1, ArrowLeft: -1, ArrowDown: flat ? -1 : 1,
    Home: -rows.length, End: rows.length };
  describe();
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") hide(); });
  plot.addEventListener("focus", () => show(at));
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", event => {
    if (event.key === "Escape") return hide();
    if (!(event.key in steps)) return;
    event.preventDefault();
    show(at + steps[event.key]);
  });
}

// A command can be copied; where the browser does not allow that it is selected.
for (const box of all(".command")) {
  const code = box.querySelector("code"), state = make("span", { textContent: "Copy" });
  state.role = "status";
  const button = make("button", { type: "button" }, state);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      state.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      state.textContent = "Selected";
    }
    setTimeout(() => { state.textContent = "Copy"; }, 2000);
  });
  box.append(button);
}

addEventListener("beforeprint", () => { for (const fold of all(".setting")) fold.open = true; });
