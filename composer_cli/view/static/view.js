"use strict";
// Keys: / to search, j and k through rows or steps, o or Enter to open, n and p between pages. A run under way is shown anew.

const rows = () => [...document.querySelectorAll("table.list tbody tr, section.step")];
let at = -1;

function move(by) {
  const all = rows();
  if (!all.length) return;
  all[at]?.classList.remove("at");
  at = Math.min(Math.max(at + by, 0), all.length - 1);
  all[at].classList.add("at");
  const target = all[at].querySelector("td a") ?? all[at];
  target.focus({ preventScroll: true });
  all[at].scrollIntoView({ block: all[at].matches("section") ? "start" : "nearest" });
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

async function refresh() {
  const answer = await fetch(location.href).catch(() => null);
  if (!answer?.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.getElementById("live");
  if (fresh) document.getElementById("live").replaceWith(document.adoptNode(fresh));
  document.body.toggleAttribute("data-live", page.body.hasAttribute("data-live"));
}

setInterval(() => { if (document.body.hasAttribute("data-live") && !document.hidden) refresh(); }, 2000);
