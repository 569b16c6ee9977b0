(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map();
  const draw = (box) => {
    const style = getComputedStyle(document.documentElement);
    const [text, soft, line] = ["text", "soft", "line"].map((name) => style.getPropertyValue("--" + name).trim());
    const colours = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11].map((n) => style.getPropertyValue("--c" + n).trim());
    const labels = { labelColor: soft, titleColor: text, titleFontWeight: 500, labelFontSize: 12, titleFontSize: 12 };
    const wide = box.clientWidth;
    const config = {
      background: "transparent", font: "system-ui, sans-serif", view: { stroke: "transparent" },
      axis: { ...labels, gridColor: line, domainColor: line, tickColor: line }, text: { color: text },
      axisQuantitative: { tickCount: 6 },
      axisXQuantitative: { tickCount: wide < 560 ? 4 : 6, labelOverlap: true, labelSeparation: 8 },
      legend: { ...labels, columns: wide < 560 ? 2 : 6 },
      mark: { color: colours[0] }, bar: { color: colours[0] }, area: { color: colours[0] },
      range: { category: colours, ordinal: colours },
    };
    const spec = JSON.parse(box.nextElementSibling.textContent);
    // `ast`: expressions are interpreted, because the page's policy forbids code that is made from text.
    const options = {
      mode: "vega-lite", actions: false, renderer: "svg", ast: true, tooltip: { theme: dark.matches ? "dark" : "light" },
    };
    // Vega names the box anew, by the description.
    vegaEmbed(box, { ...spec, config, description: box.getAttribute("aria-label") }, options)
      .then((result) => { drawn.get(box)?.finalize(); drawn.set(box, result); })
      .catch((error) => { box.textContent = "This plot could not be drawn: " + error.message; });
  };
  const drawAll = () => document.querySelectorAll(".plot").forEach(draw);
  dark.addEventListener("change", drawAll);
  drawAll();
})();
