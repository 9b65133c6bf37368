// Numbers as people read them.

export const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const showRate = (value) => (value < 10 ? value.toFixed(1) : whole.format(value));
export const showPercent = (value) => `${Math.round(value * 100)} %`;
export const showSeconds = (value) =>
  value < 1 ? `${Math.round(value * 1000)} ms` : `${Number(value.toPrecision(3))} s`;
export const plural = (count, word) => `${whole.format(count)} ${word}${count === 1 ? "" : "s"}`;
