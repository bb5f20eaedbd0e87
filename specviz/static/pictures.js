// All figures of the page as one SVG or PNG to keep, with the panels' titles and sentences and the run's facts.

import { plotly } from "./plots.js";

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = 24;
const LINE = 20;
/** PNG pixels for one of the page's. */
const SHARP = 2;

/** An SVG of everything that `root` shows; `plots` are all of the page's, seen or not; `facts` a line about the run. */
export async function drawSvg(root, plots, facts) {
  const figures = [...(await fromPlots(plots)), ...fromCanvases(root)];
  const order = [...root.querySelectorAll(".sv-panel")];
  figures.sort((a, b) => order.indexOf(a.panel) - order.indexOf(b.panel));
  const look = getComputedStyle(root);
  const width = Math.max(480, ...figures.map((figure) => figure.width)) + 2 * MARGIN;
  const svg = node("svg", { width, "font-family": look.fontFamily });
  const background = svg.appendChild(node("rect", { width, fill: pageColour(root) }));
  let y = MARGIN;
  const write = (text, size, weight) => {
    const line = node("text", { x: MARGIN, y: y + size, "font-size": size, "font-weight": weight, fill: look.color });
    line.textContent = printable(text);
    svg.append(line);
    y += LINE;
  };
  write(facts, 14, 400);
  let panel = null;
  for (const figure of figures) {
    if (figure.panel !== panel) {
      panel = figure.panel;
      y += MARGIN;
      write(panel?.querySelector(".sv-title > span")?.textContent ?? "", 16, 600);
      write(panel?.querySelector(".sv-sentence")?.textContent ?? "", 12, 400);
    }
    svg.append(node("image", { x: MARGIN, y, width: figure.width, height: figure.height, href: figure.href }));
    y += figure.height;
  }
  svg.setAttribute("height", y + MARGIN);
  svg.setAttribute("viewBox", `0 0 ${width} ${y + MARGIN}`);
  background.setAttribute("height", y + MARGIN);
  return new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" });
}

/** The same as a PNG. */
export async function drawPng(svg) {
  const image = new Image();
  // A data: address, since a picture from a blob: counts as foreign in some browsers and would taint the canvas.
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(await svg.text())}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = image.width * SHARP;
  canvas.height = image.height * SHARP;
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

async function fromPlots(plots) {
  const Plotly = await plotly();
  // What is hidden, or has nothing to show yet, has no place in a picture.
  const shown = plots.filter((plot) => plot.node.clientWidth > 0 && plot.spec().data.length);
  return Promise.all(shown.map(async (plot) => {
    const { data, layout } = plot.spec();
    const { width, height } = layout;
    const href = await Plotly.toImage({ data, layout }, { format: "svg", width, height });
    return { panel: plot.node.closest(".sv-panel"), href, width, height };
  }));
}

function fromCanvases(root) {
  const seen = [...root.querySelectorAll(".sv-panel canvas")].filter((canvas) => canvas.clientWidth > 0);
  return seen.map((canvas) => ({
    panel: canvas.closest(".sv-panel"), href: canvas.toDataURL("image/png"), width: canvas.clientWidth, height: canvas.clientHeight,
  }));
}

function node(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** XML has no word for half of an emoji, nor for control characters. */
const printable = (text) => text.toWellFormed().replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd");

/** The nearest colour behind the panels that is not transparent. */
function pageColour(root) {
  for (let at = root; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (colour && !/^(transparent|rgba\(.*, 0\))$/.test(colour)) return colour;
  }
  return "#ffffff";
}
