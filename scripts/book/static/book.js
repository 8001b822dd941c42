// What the book does beyond HTML and CSS: dark or light, search, copying, and bringing an equation's partner into view.
"use strict";

const root = document.documentElement;
function remembered(value) {
  try {
    if (value === undefined) return localStorage.getItem("theme");
    localStorage.setItem("theme", value);
  } catch { /* a browser that keeps nothing for files */ }
  return null;
}
if (remembered()) root.dataset.theme = remembered();

document.addEventListener("DOMContentLoaded", () => {
  setUpTheme(document.querySelector(".theme"));
  setUpSearch(document.querySelector(".search"));
  document.querySelectorAll(".copy").forEach(setUpCopy);
  document.addEventListener("click", onClick);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => (d.open = true)));
  addEventListener("load", () => requestAnimationFrame(() => setTimeout(arrive))); // behind the browser's own jump
  addEventListener("hashchange", () => (pinning ? (pinning = false) : arrive()));
});

function setUpTheme(button) {
  button.hidden = false;
  button.addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    remembered((root.dataset.theme = dark ? "light" : "dark"));
  });
}

function setUpCopy(button) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const text = button.parentElement.querySelector("code").textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch { // not allowed here: select it, so that a key copies it
      getSelection().selectAllChildren(button.parentElement.querySelector("code"));
      return;
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
}

// Equations and their lines. The style of the page lights them; a click pins a pair by the address.

let pinning = false;

function onClick(event) {
  document.querySelectorAll(".contents[open]").forEach((menu) => menu.contains(event.target) || (menu.open = false));
  const tag = event.target.closest("a.tag");
  const part = event.target.closest(".sides [data-eq]:not(a)");
  if (!part || (!tag && event.target.closest("a")) || event.ctrlKey || event.metaKey || event.shiftKey) return;
  if (!tag && String(getSelection())) return; // text was being selected
  const keys = part.dataset.eq.split(" ");
  const named = tag && decodeURIComponent(tag.hash.slice(1)).replace(/-code$/, "");
  const key = keys.includes(named) ? named : keys[0];
  const partners = partnersOf(key, part);
  if (!partners.length) return; // it is on another page: the link leads there
  event.preventDefault();
  const pinned = pinnedKey() === key;
  setHash(pinned && !tag ? "" : key);
  if (!pinned || tag) show(partners[0]);
}

function pinnedKey() {
  return decodeURIComponent(location.hash.slice(1)).replace(/-code$/, "");
}

function partnersOf(key, part) {
  const all = [...document.querySelectorAll(`.sides [data-eq~="${CSS.escape(key)}"]:not(a)`)];
  return all.filter((other) => other.matches(".eq") !== part.matches(".eq"));
}

function setHash(key) { // and nothing moves
  const boxes = [...document.querySelectorAll(".sides > .code")].map((box) => [box, box.scrollTop]);
  const [x, y] = [scrollX, scrollY];
  if (decodeURIComponent(location.hash.slice(1)) !== key) {
    pinning = true;
    location.hash = key;
  }
  boxes.forEach(([box, top]) => (box.scrollTop = top));
  scrollTo(x, y);
}

function show(element) { // in its box, if that scrolls, and on the screen
  const box = element.closest(".code");
  if (box && box.scrollHeight > box.clientHeight) {
    const [inner, outer] = [element.getBoundingClientRect(), box.getBoundingClientRect()];
    if (inner.top < outer.top || inner.bottom > outer.bottom) {
      box.scrollTop += inner.top - outer.top - box.clientHeight / 2;
    }
  }
  const place = element.getBoundingClientRect();
  if (place.top < document.querySelector(".bar").offsetHeight || place.bottom > innerHeight) {
    scrollBy(0, place.top - innerHeight / 2);
  }
}

function arrive() { // by a link: an equation brings its line along if they stand side by side
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const part = target && target.closest(".sides [data-eq]:not(a)");
  if (!part) return;
  const partner = partnersOf(pinnedKey(), part)[0];
  const sides = part.closest(".sides");
  const beside = getComputedStyle(sides).gridTemplateColumns.split(" ").length > 1;
  if (!partner || partner.closest(".sides") !== sides || !beside) return show(part);
  const [equation, line] = part.matches(".eq") ? [part, partner] : [partner, part];
  show(equation);
  show(line);
}

// Search: every word of the query must be in an entry; those with it in the title come first.

function plain(text) {
  return text.normalize("NFKD").toLowerCase().match(/[a-z0-9]+/g) || [];
}

function score(words, [, title, page, , further]) {
  const titled = plain(title);
  const rest = plain(`${page} ${further}`);
  let total = 0;
  for (const whole of words) {
    const number = /^\d+$/.test(whole);
    const word = whole.length > 3 ? whole.replace(/s$/, "") : whole; // "transposes" finds "transpose"
    if (titled.includes(whole)) total += 10;
    else if (!number && titled.some((w) => w.startsWith(word))) total += 6;
    else if (!number && word.length > 2 && titled.some((w) => w.includes(word))) total += 4;
    else if (!number && rest.some((w) => w.startsWith(word))) total += 2;
    else return 0;
  }
  return total + 1 / titled.length;
}

function setUpSearch(form) {
  form.hidden = false;
  const input = form.querySelector("input");
  const list = form.querySelector(".found");
  let chosen = 0;

  function choose(i) {
    const links = [...list.querySelectorAll("a")];
    chosen = links.length ? (i + links.length) % links.length : 0;
    links.forEach((link, j) => link.classList.toggle("chosen", j === chosen));
    if (links[chosen]) links[chosen].scrollIntoView({ block: "nearest" });
  }

  function look() {
    const words = plain(input.value);
    list.hidden = !words.length;
    list.replaceChildren();
    if (!words.length) return;
    const found = window.SEARCH.map((entry) => [score(words, entry), entry]).filter(([s]) => s);
    found.sort(([a], [b]) => b - a);
    for (const [, [kind, title, page, href, further]] of found.slice(0, 12)) {
      const link = Object.assign(document.createElement("a"), { href, textContent: title });
      const note = kind === "equation" ? further.split("  ")[0] : kind;
      const small = Object.assign(document.createElement("small"), { textContent: page ? `${note} · ${page}` : note });
      link.append(small);
      list.append(Object.assign(document.createElement("li"), {}));
      list.lastChild.append(link);
    }
    if (!found.length) {
      const note = "Nothing found. Try a class, an equation such as RMSNorm 8, or a word of a heading.";
      list.append(Object.assign(document.createElement("li"), {}));
      list.lastChild.append(Object.assign(document.createElement("p"), { textContent: note }));
    }
    choose(0);
  }

  input.addEventListener("input", look);
  input.addEventListener("focus", look);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      choose(chosen + (event.key === "ArrowDown" ? 1 : -1));
    } else if (event.key === "Escape") {
      list.hidden = true;
      input.blur();
    }
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const link = list.querySelectorAll("a")[chosen];
    if (!link) return;
    list.hidden = true;
    input.blur();
    link.click();
  });
  document.addEventListener("click", (event) => form.contains(event.target) || (list.hidden = true));
  list.addEventListener("click", () => (list.hidden = true));
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !event.target.closest("input, textarea")) {
      event.preventDefault();
      input.focus();
    }
  });
}
