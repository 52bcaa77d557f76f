// Elements outside the window, or text outside its picture, unless a scrollable element has them.
[...document.querySelectorAll('body *')].filter(one => {
  if (one.closest('.scroll, .hidden, script, .picture') && !one.matches('.scroll')) return false;
  if (!one.checkVisibility() || one.closest('clipPath, defs')) return false;
  const box = one.getBoundingClientRect(), owner = one.closest('svg');
  const limits = owner && one !== owner ? owner.getBoundingClientRect() : {left: 0, right: innerWidth};
  const isCut = box.width && (box.left < limits.left - 1 || box.right > limits.right + 1);
  const hides = !owner && one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflowX === 'hidden';
  return one.matches('path, g, rect') ? false : isCut || hides;
}).map(one => one.outerHTML.slice(0, 120))
