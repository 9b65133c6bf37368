// Finding and making elements.

export const $ = (selector, root = document) => root.querySelector(selector);

export function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}
