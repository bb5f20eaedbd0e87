// The steps of the tour: each sets the page up, says what to do, and what to look for.
//
// `set`: settings of the controls; `whatif`: of the what-if panel; `panel`: where to look; `run`: offer to generate.

export const STEPS = [
  {
    title: "What an expert is",
    text: "Each layer of this model holds 16 small networks, its experts, and sends every token to two of them. Only four of 16 fit in fast memory: the others wait behind a link.",
    look: "Each row is a layer, each column an expert; a frame means that it is in fast memory. Point at a token above: its experts light up.",
    panel: "experts",
    set: { link: "emulated:deepseek-lite-a100", draft: "self-int4", k: "auto", prefetch: "auto", policy: "lookahead", slots: 4, sequences: 1 },
    run: true,
  },
  {
    title: "Why a miss stalls",
    text: "Without a draft nobody knows which experts come next. A missing one is fetched when its layer asks for it, and the engine stands still meanwhile.",
    look: "The hatched stretches: the engine waits for the red transfers below them. The share of time lost is in the tile “Stall”.",
    panel: "timeline",
    set: { link: "emulated:deepseek-lite-a100", draft: "none", k: 0, prefetch: "none", policy: "lru", slots: 4, sequences: 1 },
    run: true,
  },
  {
    title: "What the draft guesses",
    text: "A copy of the model with 4-bit experts fits in fast memory. It writes four tokens ahead; the real model checks all of them in one pass and keeps those that it would have written itself.",
    look: "Solid underlines are accepted guesses, they came free. Dashed is the model's correction of a wrong one. The text is the one of the step before, letter for letter.",
    panel: "tokens",
    set: { link: "emulated:deepseek-lite-a100", draft: "self-int4", k: 4, prefetch: "none", policy: "lookahead", slots: 4, sequences: 1 },
    run: true,
  },
  {
    title: "What prefetch hides",
    text: "The draft is sent to experts, too, and the real model will want nearly the same ones. So their transfers start while the draft still computes.",
    look: "Yellow transfers under the blue draft: hidden time. Arrows lead to the layer that used them. “Overlap” says which share of transfer time was hidden.",
    panel: "timeline",
    set: { link: "emulated:deepseek-lite-a100", draft: "self-int4", k: 4, prefetch: "draft", policy: "lookahead", slots: 4, sequences: 1 },
    run: true,
  },
  {
    title: "When it does not pay",
    text: "This draft is a poor one: of each token's experts it uses a single one that is resident. Eight guesses a round, few of them right, and the disk is fast, so there is little to hide. Press “Measure the baseline” first, then generate.",
    look: "“Speed” holds the run against the measured baseline: below 1.00 × the draft costs more than it brings. Back to k = 0, or to a better draft, and it turns.",
    panel: "speed",
    set: { link: "disk", draft: "sparse-1", k: 8, prefetch: "none", policy: "lookahead", slots: 4, sequences: 1 },
    run: true,
  },
  {
    title: "What the governor does",
    text: "Nobody has to know in advance. The governor measures what drafting, checking and waiting cost, predicts tokens/s for every draft length, and takes the best; k = 0 (no draft) is one of them.",
    look: "k over the rounds, with each reason in words. Diamonds are probes: rounds spent to learn whether the choice is still right. Move the cache slots while it runs.",
    panel: "governor",
    set: { link: "emulated:phi3.5-a100", draft: "self-int4", k: "auto", k_max: 16, prefetch: "auto", policy: "lookahead", slots: 4, sequences: 1 },
    run: true,
  },
  {
    title: "Batch 1 against batch 16",
    text: "Sixteen beginnings are written at once. Nearly every expert is wanted in every pass, whoever drafts: all of them stream through, and each works for sixteen texts, with a draft for several tokens of each (SpecMoEOff). Generate, then set “Sequences at once” back to 1 and generate again.",
    look: "Tokens/s of all sequences together, here and with one. “What if”, further down, simulates the same on an A30 with Mixtral: SpecMoEOff against “streamed, no draft”.",
    panel: "speed",
    set: { link: "emulated:deepseek-lite-a100", draft: "self-int4", k: 4, prefetch: "auto", policy: "lookahead", slots: 4, sequences: 16 },
    run: true,
    whatif: { hardware: "a30", model: "mixtral-8x7b", batch: 16, k: 4, acceptance: 0.8 },
  },
  {
    title: "Your own GPU",
    text: "Choose your machine and a model. Operators run as fast as published roofs allow; nothing is loaded. It begins with an A100 and Mixtral, where a draft of eight tokens pays if 95 % are accepted.",
    look: "Which bar is longest, what binds (it nearly always is the link), and how far acceptance has to fall before speculation stops paying.",
    panel: "whatif",
    whatif: { hardware: "a100-40gb", model: "mixtral-8x7b", batch: 1, k: 8, acceptance: 0.95 },
  },
];
