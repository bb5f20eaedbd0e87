// A hierarchical roofline, log–log: the roofs of memory, link and arithmetic, and one dot a phase.

/** Colour and dash of a roof by its name. */
const ROOFS = [
  [/^gpu arithmetic/, "experts", "solid"], [/^gpu memory/, "attention", "solid"], [/^cpu arithmetic/, "experts", "dot"],
  [/^cpu memory/, "attention", "dot"], [/^the (link|disk)/, "demand", "solid"],
];
const DOTS = { draft: "draft", "verify attention": "attention", "verify attention, moved": "demand", projections: "plain", experts: "experts",
  "shared weights": "attention", "experts, whole round": "demand" };

/**
 * `report.roofs`: {roof, tflops, gbps}, one of the two null; `report.roofline`: {phase, where, intensity (FLOP a byte),
 * tflops, binds} and, where it was measured, `measured` (TFLOP/s).
 */
export function roofsFigure(report, looks) {
  if (!report) return { data: [], layout: {} };
  const points = report.roofline;
  const xs = points.map((point) => point.intensity);
  const low = Math.min(...xs, 1) / 3;
  const high = Math.max(...xs, 100) * 5;
  // Where no arithmetic was measured, slopes end above the highest point.
  const top = Math.max(...report.roofs.map((roof) => roof.tflops ?? 0)) || 10 * Math.max(...points.map((point) => point.measured));
  const lines = report.roofs.map(({ roof, tflops, gbps }) => line(roof, tflops, gbps, { low, high, top }, looks));
  const dots = points.map((point) => ({
    name: point.phase, type: "scatter", mode: "markers", x: [point.intensity], y: [point.measured ?? point.tflops],
    marker: { color: looks[DOTS[point.phase]] ?? looks.ink, size: 12, line: { color: looks.panel, width: 1.5 } },
    hovertemplate: `${point.phase} on the ${point.where}: %{x:.3~g} FLOP/byte, %{y:.3~g} TFLOP/s; ${point.binds} binds<extra></extra>`,
  }));
  const bottom = Math.min(...points.map((point) => point.measured ?? point.tflops)) / 4;
  return {
    data: [...lines, ...dots],
    layout: {
      showlegend: false,
      margin: { l: 52, r: 14, t: 8, b: 44 },
      xaxis: { title: { text: "FLOP/byte" }, type: "log", range: [Math.log10(low), Math.log10(high)], dtick: 1 },
      yaxis: { title: { text: "TFLOP/s" }, type: "log", range: [Math.log10(bottom), Math.log10(top * 2)], dtick: 1, exponentformat: "power" },
    },
  };
}

/** The legend of such a figure, as [class of the swatch, words] pairs. */
export const roofsLegend = (report) => [
  ...report.roofs.map(({ roof }) => [`sv-roof sv-roof-${look(roof)[1]} sv-roof-${look(roof)[2]}`, roof]),
  ...report.roofline.map(({ phase, where }) => [`sv-dot sv-dot-${DOTS[phase] ?? "plain"}`, `${phase} (${where})`]),
];

const look = (roof) => ROOFS.find(([pattern]) => pattern.test(roof)) ?? [null, "muted", "solid"];

/** A ceiling, or a slope up to where the highest ceiling cuts it. */
function line(roof, tflops, gbps, { low, high, top }, looks) {
  const [, colour, dash] = look(roof);
  const end = tflops === null ? Math.min(high, (top * 1e3) / gbps) : high;
  const y = (x) => tflops ?? (x * gbps) / 1e3;
  return {
    name: roof, type: "scatter", mode: "lines", x: [low, end], y: [y(low), y(end)],
    line: { color: looks[colour], width: 2, dash },
    hovertemplate: `${roof}: ${tflops === null ? `${gbps} GB/s` : `${tflops} TFLOP/s`}<extra></extra>`,
  };
}
