// Draw the formulas, by the copy of KaTeX 0.19.1 that is beside this file.
document.addEventListener("DOMContentLoaded", () => {
  for (const formula of document.querySelectorAll(".arithmatex")) {
    const isDisplay = formula.textContent.startsWith("\\[");
    katex.render(formula.textContent.slice(2, -2), formula, {
      displayMode: isDisplay,
      throwOnError: false,
    });
  }
});
