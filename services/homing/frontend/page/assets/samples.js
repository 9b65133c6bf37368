// What the page has seen: samples of /fleet, oldest first, and the waits of its own chats.
//
// Rates are differences between two samples of counters that only rise. When one falls, the
// coordinator was restarted, and the curve has a gap.

export const SPAN_S = 300; // what the plots show
export const GAP_S = 5; // samples further apart are not joined
const RATE_S = 4; // over how long a rate is measured
const HIT_S = 15; // over how long a hit rate is: prompts come more rarely than tokens

export const ownTtfts = []; // [time, seconds] of this page's own chats

export const samples = [];

export function remember(fleet) {
  samples.push({ ...fleet, time_s: performance.now() / 1000 });
  while (samples[0].time_s < samples.at(-1).time_s - SPAN_S - HIT_S) samples.shift();
}

/** The oldest sample of the last `span` seconds before sample `index`, or undefined after a gap. */
function before(index, span) {
  let earliest;
  for (let at = index - 1; at >= 0; at--) {
    if (samples[at + 1].time_s - samples[at].time_s > GAP_S) break;
    if (samples[index].time_s - samples[at].time_s > span) break;
    earliest = samples[at];
  }
  return earliest;
}

/** How `count`, a function of a sample, grew per second; null where that cannot be said. */
export function rateAt(index, count) {
  const earlier = before(index, RATE_S);
  if (!earlier) return null;
  const grown = count(samples[index]) - count(earlier);
  return grown >= 0 ? grown / (samples[index].time_s - earlier.time_s) : null;
}

/** How much of `all` the growth of `part` was; null where neither grew. */
export function ratioAt(index, part, all) {
  const earlier = before(index, HIT_S);
  if (!earlier) return null;
  const grown = all(samples[index]) - all(earlier);
  return grown > 0 ? Math.max(0, (part(samples[index]) - part(earlier)) / grown) : null;
}

export const curve = (at) => samples.map((sample, index) => [sample.time_s, at(index)]);

export const ofRank = (rank, key) => (sample) =>
  sample.ranks.find((row) => row.rank === rank)?.[key] ?? 0;
