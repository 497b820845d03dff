// Asks the built site's search as a browser does: its own worker, its own index. Prints one JSON line for each question: the
// pages that answer, best first. Usage: node search_site.js SITE QUESTION...
"use strict";
const fs = require("fs"), path = require("path"), vm = require("vm");
const [site, ...questions] = process.argv.slice(2);
const workers = path.join(site, "assets", "javascripts", "workers");
const script = fs.readdirSync(workers).find((name) => /^search\..*\.js$/.test(name));
const answers = [];
let ask;
const worker = { console, addEventListener: (_, receive) => { ask = receive; }, postMessage: (answer) => answers.push(answer) };
worker.self = worker;
vm.runInNewContext(fs.readFileSync(path.join(workers, script), "utf8"), worker);
const answer = async (type, data) => {
  ask({ data: { type, data } });
  while (!answers.length) { await new Promise((go) => setImmediate(go)); }
  return answers.pop().data;
};
(async () => {
  const { config, docs } = JSON.parse(fs.readFileSync(path.join(site, "search", "search_index.json"), "utf8"));
  await answer(0, { config, docs, options: {} });
  for (const question of questions) {
    const { items } = await answer(2, question);
    console.log(JSON.stringify(items.map((page) => page[0].location.split("#")[0])));
  }
})();
