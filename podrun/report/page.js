// What a report's page does beyond showing itself: filter and sort tables, zoom and search timelines, read out tiles.
"use strict";
(function () {
  var all = function (where, what) { return Array.prototype.slice.call(where.querySelectorAll(what)); };
  var number = function (value) { return Math.round(value).toLocaleString("en-US"); };
  var size = function (bytes) {
    var units = ["B", "KiB", "MiB", "GiB"], unit = 0;
    while (bytes >= 1024 && unit < 3) { bytes /= 1024; unit += 1; }
    return (unit ? bytes.toFixed(1) : bytes) + " " + units[unit];
  };
  var make = function (name, text, parent) {
    var made = document.createElement(name);
    made.textContent = text;
    if (parent) { parent.appendChild(made); }
    return made;
  };

  all(document, "input[data-for]").forEach(function (box) {
    var rows = all(document, "#" + box.dataset.for + " tbody tr");
    box.addEventListener("input", function () {
      var word = box.value.toLowerCase();
      rows.forEach(function (row) { row.hidden = row.cells[0].textContent.toLowerCase().indexOf(word) < 0; });
    });
  });

  var names = new Intl.Collator("en", { numeric: true });
  all(document, "table.sortable").forEach(function (table) {
    var heads = all(table, "th"), body = table.tBodies[0];
    var key = function (row, column) { var cell = row.cells[column]; return cell.dataset.value || cell.textContent; };
    heads.forEach(function (head, column) {
      var words = head.textContent;
      head.textContent = "";
      make("button", words, head).addEventListener("click", function () {
        var down = head.getAttribute("aria-sort") !== "descending";
        heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        var rows = all(body, "tr").map(function (row) { return [key(row, column), row]; });
        rows.sort(function (a, b) {
          var order = column ? Number(a[0]) - Number(b[0]) : names.compare(a[0], b[0]);
          return down ? -order : order;
        });
        var sorted = document.createDocumentFragment();
        rows.forEach(function (one) { sorted.appendChild(one[1]); });
        body.appendChild(sorted);
      });
    });
  });

  // A tap says what hovering says.
  all(document, ".chart").forEach(function (chart) {
    var out = chart.querySelector("output");
    if (!out) { return; }
    chart.addEventListener("click", function (event) {
      var title = event.target.querySelector && event.target.querySelector("title");
      if (title && event.target.tagName === "rect") { out.textContent = title.textContent; }
    });
  });

  all(document, ".chart.timeline").forEach(function (chart) {
    var svg = chart.querySelector("svg"), out = chart.querySelector("output");
    var width = svg.viewBox.baseVal.width, height = svg.viewBox.baseVal.height, cycles = Number(chart.dataset.cycles);
    var from = 0, span = width, tools = document.createElement("div");
    tools.className = "tools";
    chart.insertBefore(tools, svg);
    var show = function (start, wide) {
      span = Math.min(width, Math.max(wide, width / 4096));
      from = Math.min(width - span, Math.max(0, start));
      svg.setAttribute("viewBox", from + " 0 " + span + " " + height);
      var first = from / width * cycles, last = (from + span) / width * cycles;
      out.textContent = "cycles " + number(first) + " to " + number(last) + " of " + number(cycles);
    };
    var zoom = function (factor, at) { show(from + span * at * (1 - factor), span * factor); };
    [["+", "zoom in", 0.5], ["\u2212", "zoom out", 2]].forEach(function (one) {
      var button = make("button", one[0], tools);
      button.setAttribute("aria-label", one[1]);
      button.addEventListener("click", function () { zoom(one[2], 0.5); });
    });
    [["\u2190", "earlier", -0.5], ["\u2192", "later", 0.5]].forEach(function (one) {
      var button = make("button", one[0], tools);
      button.setAttribute("aria-label", one[1]);
      button.addEventListener("click", function () { show(from + span * one[2], span); });
    });
    make("button", "all", tools).addEventListener("click", function () { show(0, width); });
    var box = make("input", "", tools);
    box.placeholder = "search: layer or operator";
    box.setAttribute("aria-label", "search in the timeline");
    box.addEventListener("input", function () {
      var word = box.value.toLowerCase(), hits = 0, taken = 0, first = null;
      all(svg, "rect").forEach(function (rect) {
        var title = rect.querySelector("title").textContent;
        var hit = Boolean(word) && title.toLowerCase().indexOf(word) >= 0;
        rect.classList.toggle("hit", hit);
        if (hit) { hits += 1; taken += Number(rect.dataset.cycles); first = first || rect; }
      });
      svg.classList.toggle("dim", Boolean(word));
      if (!word) { show(from, span); return; }
      if (first && (first.x.baseVal.value > from + span || first.x.baseVal.value < from)) {
        show(first.x.baseVal.value - span / 2, span);
      }
      out.textContent = hits + " phases, " + number(taken) + " cycles (" + (100 * taken / cycles).toFixed(1) + " %)";
    });
    svg.addEventListener("wheel", function (event) {
      if (!event.ctrlKey && !event.shiftKey) { return; } // The page scrolls.
      event.preventDefault();
      var place = svg.getBoundingClientRect();
      zoom(event.deltaY < 0 ? 0.8 : 1.25, (event.clientX - place.left) / place.width);
    }, { passive: false });
    var held = null;
    svg.addEventListener("pointerdown", function (event) { held = [event.clientX, from]; });
    svg.addEventListener("pointermove", function (event) {
      if (held) { show(held[1] - (event.clientX - held[0]) / svg.getBoundingClientRect().width * span, span); }
    });
    window.addEventListener("pointerup", function () { held = null; });
    show(0, width);
  });

  all(document, ".chart.tiles").forEach(function (chart) {
    var svg = chart.querySelector("svg"), out = chart.querySelector("output");
    var parts = JSON.parse(chart.dataset.tiles), most = Number(chart.dataset.capacity);
    var tiles = parts.length ? parts[parts.length - 1][1] : 1, pinned = false, first = out.textContent;
    var say = function (event) {
      var place = svg.getBoundingClientRect();
      var tile = Math.min(tiles - 1, Math.max(0, Math.floor((event.clientX - place.left) / place.width * tiles)));
      var part = parts.filter(function (one) { return one[0] <= tile && tile < one[1]; })[0];
      if (!part) { return; }
      var held = Object.keys(part[2]).filter(function (name) { return part[2][name]; });
      var total = held.reduce(function (sum, name) { return sum + part[2][name]; }, 0);
      out.textContent = "tile " + tile + ": " + size(total) + " of " + size(most) + " (" + (100 * total / most).toFixed(1) +
        " %): " + held.map(function (name) { return name.replace(/_/g, " ") + " " + size(part[2][name]); }).join(", ");
    };
    svg.addEventListener("pointermove", function (event) { if (!pinned) { say(event); } });
    svg.addEventListener("pointerleave", function () { if (!pinned) { out.textContent = first; } });
    svg.addEventListener("click", function (event) {
      pinned = !pinned;
      say(event);
      var layers = document.getElementById(chart.dataset.layers);
      if (layers) { layers.open = pinned; }
    });
  });
}());
