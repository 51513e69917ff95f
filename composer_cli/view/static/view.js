"use strict";
// Keys: / to search, j and k through rows or steps, o or Enter to open, n and p between pages. A run under way is shown anew.

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
  };
  if (!(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
});

// A link that outlives this server, whose address holds a token of its own: `composer view LINK` opens the same page.
const copy = document.querySelector("button.copy");
copy.hidden = !navigator.clipboard || location.pathname === copy.dataset.base;
copy.addEventListener("click", async () => {
  const page = (location.pathname + location.search + location.hash).slice(copy.dataset.base.length);
  await navigator.clipboard.writeText(`composer view '${page.replaceAll("'", "%27")}'`);
  copy.textContent = "copied";
  setTimeout(() => { copy.textContent = "copy link"; }, 1500);
});

async function refresh() {
  const answer = await fetch(location.href).catch(() => null);
  if (!answer?.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.getElementById("live");
  if (fresh) document.getElementById("live").replaceWith(document.adoptNode(fresh));
  document.body.toggleAttribute("data-live", page.body.hasAttribute("data-live"));
}

setInterval(() => { if (document.body.hasAttribute("data-live") && !document.hidden) refresh(); }, 2000);
