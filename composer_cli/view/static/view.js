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

async function refresh() {
  const answer = await fetch(location.href).catch(() => null);
  if (!answer?.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.getElementById("live");
  if (fresh) document.getElementById("live").replaceWith(document.adoptNode(fresh));
  document.body.toggleAttribute("data-live", page.body.hasAttribute("data-live"));
}

setInterval(() => { if (document.body.hasAttribute("data-live") && !document.hidden) refresh(); }, 2000);
