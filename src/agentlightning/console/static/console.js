// The console's script: the kept theme, live parts, crosshairs, smoothing and keys. Every page can be read without it.
"use strict";
const root = document.documentElement;
const kept = (name) => { try { return localStorage.getItem(name); } catch { return null; } };
const keep = (name, value) => { try { localStorage.setItem(name, value); } catch { /* a private window keeps nothing */ } };
root.classList.add("scripted");
const THEMES = { "": "System theme", light: "Light theme", dark: "Dark theme" };
const theme = () => (kept("theme") in THEMES ? kept("theme") : "");
root.dataset.theme = theme();

// Numbers of an SVG line, read back from its axes: [x, y] in units of the chart.
const axis = (text) => { const [low, high, start, end] = text.split(" ").map(Number); return { low, high, start, end }; };
const value = (at, place) => at.low + (place - at.start) / (at.end - at.start || 1) * (at.high - at.low);
const places = (line) => (line.dataset.raw || line.getAttribute("points")).split(" ").map((one) => one.split(",").map(Number));
const text = (number) => String(Number(number.toPrecision(3)));

function smooth(svg, weight) {
  for (const line of svg.querySelectorAll("polyline.curve:not(.measured)")) {
    line.dataset.raw ||= line.getAttribute("points");
    let last = null, sum = 0;
    const points = places(line).map(([x, y]) => {
      last = (last ?? 0) * weight + y * (1 - weight);
      sum = sum * weight + (1 - weight);  // without the pull of the start, as W&B and TensorBoard do
      return `${x},${(last / sum).toFixed(2)}`;
    });
    line.setAttribute("points", points.join(" "));
  }
}

function point(event) {
  const svg = event.target.closest?.("figure.chart > svg");
  document.querySelectorAll(".cross, .tip").forEach((one) => one.remove());
  if (!svg) return;
  const x = axis(svg.dataset.x), y = axis(svg.dataset.y), box = svg.getBoundingClientRect();
  const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
  const lines = [...svg.querySelectorAll("polyline.curve")];
  const all = lines.flatMap((line) => places(line).map((one) => one[0]));
  const nearest = all.reduce((best, one) => (Math.abs(one - at) < Math.abs(best - at) ? one : best), Infinity);
  if (!Number.isFinite(nearest)) return;
  const rows = [`${svg.dataset.label} ${text(value(x, nearest))}`];
  for (const line of lines) {
    const found = places(line).find((one) => Math.abs(one[0] - nearest) < 0.01);
    if (found) rows.push(`${line.dataset.label}  ${text(value(y, found[1]))}`);
  }
  const cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, to] of Object.entries({ class: "cross", x1: nearest, x2: nearest, y1: y.end, y2: y.start })) cross.setAttribute(name, to);
  svg.append(cross);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.textContent = rows.join("\n");
  svg.parentElement.append(tip);
  const left = box.left - svg.parentElement.getBoundingClientRect().left + nearest / svg.viewBox.baseVal.width * box.width;
  tip.style.top = "40px";
  tip.style.left = `${left > box.width / 2 ? left - tip.offsetWidth - 10 : left + 10}px`;
}

function dress(part) {
  const weight = Number(kept("smoothing")) || 0;
  for (const label of part.querySelectorAll(".smooth")) {
    label.hidden = false;
    label.firstElementChild.value = weight;
    smooth(label.closest("figure").querySelector("svg[data-x]"), weight);
  }
}

function live(part) {
  let mark = part.dataset.mark, asking = false;
  setInterval(async () => {
    if (document.hidden || asking) return;
    asking = true;
    try {
      const answer = await fetch(part.dataset.live, { headers: { "If-None-Match": mark } });
      if (answer.ok && answer.headers.get("ETag")) {
        const open = [...part.querySelectorAll("details[open]")].map((one) => one.id);
        part.innerHTML = await answer.text();
        for (const id of open) document.getElementById(id)?.setAttribute("open", "");
        dress(part);
        mark = answer.headers.get("ETag");
      }
    } catch { /* while nobody answers it shows what it has */ } finally { asking = false; }
  }, 2000);
}

document.addEventListener("DOMContentLoaded", () => {
  const toggle = document.querySelector(".theme");
  if (toggle) {
    const show = () => { root.dataset.theme = theme(); toggle.lastElementChild.textContent = THEMES[theme()]; toggle.setAttribute("aria-label", THEMES[theme()]); };
    toggle.hidden = false;
    show();
    toggle.addEventListener("click", () => { const names = Object.keys(THEMES); keep("theme", names[(names.indexOf(theme()) + 1) % names.length]); show(); });
  }
  dress(document);
  document.querySelectorAll("[data-live]").forEach(live);
  document.querySelector(".turn.current")?.scrollIntoView({ block: "nearest" });
  document.querySelectorAll("nav a[aria-current]").forEach((one) => one.scrollIntoView({ block: "nearest", inline: "center" }));
});
document.addEventListener("change", (event) => { if (event.target.matches(".auto")) event.target.form.requestSubmit(); });
document.addEventListener("input", (event) => {
  if (!event.target.matches(".smooth input")) return;
  keep("smoothing", event.target.value);
  smooth(event.target.closest("figure").querySelector("svg[data-x]"), Number(event.target.value));
});
document.addEventListener("pointermove", point);
document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || event.target.matches("input, select, textarea")) return;
  const way = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  if (way) document.querySelector(`a[rel=${way}]`)?.click();
  if (event.key === "/") { event.preventDefault(); document.querySelector(".search input")?.focus(); }
});
