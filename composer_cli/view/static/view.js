"use strict";
// Keys: / to search (in a list, or within a rollout), j and k through rows or steps, o or Enter to open, n and p between pages or rollouts, u from a rollout to its list. A run under way is shown anew.

const rows = () => [...document.querySelectorAll("table.list tbody tr, section.step, article.card")];
let at = -1;

function move(by) {
  const all = rows();
  if (!all.length) return;
  all[at]?.classList.remove("at");
  at = Math.min(Math.max(at + by, 0), all.length - 1);
  all[at].classList.add("at");
  const target = all[at].querySelector("td a") ?? all[at];
  target.focus({ preventScroll: true });
  all[at].scrollIntoView({ block: all[at].matches("section, article") ? "start" : "nearest" });
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, select, textarea");
  if (event.key === "Escape" && typing) typing.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = {
    "/": () => document.querySelector("input[type=search]")?.focus(),
    j: () => move(1),
    k: () => move(-1),
    o: () => rows()[at]?.querySelector("td a, summary")?.click(),
    n: () => document.querySelector("a[rel=next]")?.click(),
    p: () => document.querySelector("a[rel=prev]")?.click(),
    u: () => document.querySelector("a[rel=up]")?.click(),
  };
  if (!(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
});

// A choice in the form of a list is followed at once; texts wait for Enter.
document.querySelectorAll(".filters[role=search] select").forEach((choice) => choice.addEventListener("change", () => choice.form.requestSubmit()));

// Long texts are folded until they are asked for.
const TALLEST = 480; // px
for (const block of document.querySelectorAll(".said pre:not(.clip), .texts pre")) {
  if (block.scrollHeight <= TALLEST) continue;
  const box = document.createElement("div"), button = document.createElement("button");
  block.replaceWith(box);
  box.append(block, button);
  block.classList.add("folded");
  if (box.closest(".texts")) block.scrollTop = block.scrollHeight; // a log of tests ends with what failed
  button.className = "unfold";
  button.type = "button";
  button.textContent = `show all ${block.textContent.split("\n").length} lines`;
  button.addEventListener("click", () => { block.classList.remove("folded"); button.remove(); });
}

// A link that outlives this server, whose address holds a token of its own: `composer view LINK` opens the same page.
const copy = document.querySelector("button.copy");
copy.hidden = !navigator.clipboard || location.pathname === copy.dataset.base;
copy.addEventListener("click", async () => {
  const page = (location.pathname + location.search + location.hash).slice(copy.dataset.base.length);
  await navigator.clipboard.writeText(`composer view '${page.replaceAll("'", "%27")}'`);
  copy.textContent = "copied";
  setTimeout(() => { copy.textContent = "copy link"; }, 1500);
});

// The search within a rollout: marks every hit, also where a text is folded or cut into tokens; Enter goes to the next
// and opens what it lies in, Shift and Enter to the one before.
const find = document.getElementById("find");
if (find) {
  const told = document.querySelector(".find output");
  let hits = [], here = -1;

  const inBlock = (block, wanted) => {
    const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT), pieces = [], starts = [];
    let length = 0;
    while (walker.nextNode()) {
      pieces.push(walker.currentNode);
      starts.push(length);
      length += walker.currentNode.length;
    }
    const whole = pieces.map((piece) => piece.data).join(""), lower = whole.toLowerCase();
    const text = lower.length === length ? lower : whole; // a few letters have two in lower case
    let piece = 0;
    const place = (offset) => {
      while (piece + 1 < starts.length && starts[piece + 1] <= offset) piece += 1;
      return [pieces[piece], offset - starts[piece]];
    };
    for (let from = text.indexOf(wanted); from >= 0; from = text.indexOf(wanted, from + wanted.length)) {
      const range = new Range();
      range.setStart(...place(from));
      range.setEnd(...place(from + wanted.length - 1));
      range.setEnd(range.endContainer, range.endOffset + 1);
      hits.push(range);
    }
  };

  const mark = () => {
    told.textContent = !find.value ? "" : here < 0 ? `${hits.length} found` : `${here + 1} of ${hits.length}`;
    if (!window.Highlight) return;
    CSS.highlights.set("found", new Highlight(...hits));
    CSS.highlights.set("here", new Highlight(...(here < 0 ? [] : [hits[here]])));
  };

  document.querySelector(".find").hidden = false;
  find.addEventListener("input", () => {
    [hits, here] = [[], -1];
    const wanted = find.value.toLowerCase();
    if (wanted) document.querySelectorAll("main pre, main dd").forEach((block) => inBlock(block, wanted));
    mark();
  });
  find.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !hits.length) return;
    here = (here + (event.shiftKey ? (here < 0 ? 0 : -1) : 1) + hits.length) % hits.length;
    let around = hits[here].startContainer.parentElement;
    for (; around; around = around.parentElement) {
      if (around.matches("details")) around.open = true;
      if (around.matches(".folded")) around.nextElementSibling.click();
    }
    window.scrollBy(0, hits[here].getBoundingClientRect().top - window.innerHeight / 2);
    mark();
  });
}

// Curves: the values at the step below the pointer, and smoothing by a mean whose weights fall with every point behind.
const parsed = new WeakMap();
let smoothing = 0;

function pointsOf(path) {
  if (!parsed.has(path)) {
    const values = path.dataset.points.split(" ").map((point) => point.split(":"));
    const places = path.getAttribute("d").slice(1).split(" L").map((place) => place.split(",").map(Number));
    parsed.set(path, places.map(([x, y], at) => ({ x, y, step: values[at][0], value: values[at][1] })));
  }
  return parsed.get(path);
}

function smooth() {
  document.querySelectorAll(".smooth").forEach((control) => {
    control.hidden = false;
    control.querySelector("input").value = smoothing;
    control.querySelector("output").textContent = smoothing ? smoothing.toFixed(2) : "none";
  });
  document.querySelectorAll("svg.curve path.raw").forEach((path) => path.remove());
  document.querySelectorAll("svg.curve path[data-points]").forEach((path) => {
    const points = pointsOf(path), draw = (y) => `M${points.map((point) => `${point.x},${y(point).toFixed(1)}`).join(" L")}`;
    let mean = 0, place = 0, weight = 0;
    for (const point of points) {
      mean = smoothing * mean + (1 - smoothing) * point.value;
      place = smoothing * place + (1 - smoothing) * point.y;
      weight = smoothing * weight + 1 - smoothing;
      [point.mean, point.place] = [mean / weight, place / weight];
    }
    path.setAttribute("d", draw((point) => point.place));
    if (!smoothing || path.classList.contains("thin")) return;
    const raw = path.cloneNode();
    raw.removeAttribute("data-points");
    raw.classList.add("raw");
    raw.setAttribute("d", draw((point) => point.y));
    path.before(raw);
  });
}

function readOut(svg, pointer) {
  const box = svg.getBoundingClientRect(), { width, height } = svg.viewBox.baseVal;
  const across = (pointer - box.left) * width / box.width;
  const nearest = (points) => points.reduce((best, point) => Math.abs(point.x - across) < Math.abs(best.x - across) ? point : best);
  const drawn = [...svg.querySelectorAll("path[data-points]")].map((path) => [path, nearest(pointsOf(path))]);
  const { x, step } = nearest(drawn.map(([, point]) => point));
  const at = drawn.filter(([, point]) => Math.abs(point.x - x) < 3).sort((a, b) => a[1].y - b[1].y);
  const line = document.createElementNS(svg.namespaceURI, "path"), readout = svg.parentElement.querySelector(".readout");
  line.setAttribute("class", "at");
  line.setAttribute("d", `M${x},6 L${x},${height - 22}${at.map(([, point]) => ` M${x - 2.5},${point.place} h5`).join("")}`);
  svg.querySelector("path.at")?.remove();
  svg.append(line);
  readout.replaceChildren(`step ${step}`, ...at.slice(0, 12).map(([path, point]) => {
    const row = document.createElement("div"), value = document.createElement("b");
    row.className = (path.getAttribute("class") ?? "").replace("thin", "");
    value.textContent = point.value;
    const notes = [smoothing && `smoothed ${point.mean.toPrecision(4)}`, point.step !== step && `step ${point.step}`].filter(Boolean);
    row.append(value, ` ${drawn.length > 1 ? path.dataset.label : ""} ${notes.length ? `(${notes.join(", ")})` : ""}`);
    return row;
  }), at.length > 12 ? `and ${at.length - 12} more` : "");
  readout.hidden = false;
  const place = x / width * box.width, right = place > box.width / 2;
  readout.style.left = right ? "" : `${place + 12}px`;
  readout.style.right = right ? `${box.width - place + 12}px` : "";
}

document.addEventListener("input", (event) => {
  if (!event.target.closest(".smooth")) return;
  smoothing = Number(event.target.value);
  smooth();
});
for (const moved of ["pointermove", "pointerdown"]) document.addEventListener(moved, (event) => {
  const svg = event.target.closest?.("svg.curve");
  document.querySelectorAll(".readout:not([hidden])").forEach((readout) => {
    if (readout.parentElement === svg?.parentElement) return;
    readout.hidden = true;
    readout.parentElement.querySelector("path.at")?.remove();
  });
  if (svg) readOut(svg, event.clientX);
});
smooth();

async function refresh() {
  const answer = await fetch(location.href).catch(() => null);
  if (!answer?.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.getElementById("live");
  if (fresh) document.getElementById("live").replaceWith(document.adoptNode(fresh));
  smooth();
  document.body.toggleAttribute("data-live", page.body.hasAttribute("data-live"));
}

setInterval(() => { if (document.body.hasAttribute("data-live") && !document.hidden) refresh(); }, 2000);
