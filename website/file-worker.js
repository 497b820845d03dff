// A page that is opened from the disk may not start workers. This gives it one for the search: a hidden frame that runs the
// worker's script in the page's own thread.
"use strict";
(function () {
  if (location.protocol !== "file:") { return; }
  window.Worker = function (url) {
    var worker = document.createDocumentFragment(); // An event target.
    var waiting = [], its = null, frame = document.createElement("iframe");
    var load = function (source) {
      return new Promise(function (done, failed) {
        var script = its.document.createElement("script");
        script.src = source;
        script.onload = done;
        script.onerror = failed;
        its.document.body.appendChild(script);
      });
    };
    var send = function (data) { its.dispatchEvent(new its.MessageEvent("message", { data: data })); };
    worker.postMessage = function (data) { if (waiting) { waiting.push(data); } else { send(data); } };
    worker.terminate = function () { frame.remove(); };
    frame.hidden = true;
    frame.srcdoc = "<!doctype html><body></body>";
    frame.onload = function () {
      its = frame.contentWindow;
      its.postMessage = function (data) { worker.dispatchEvent(new MessageEvent("message", { data: data })); };
      its.importScripts = function () {
        return Array.prototype.reduce.call(arguments, function (before, source) {
          return before.then(function () { return load(source); });
        }, Promise.resolve());
      };
      load(url).then(function () {
        var first = waiting;
        waiting = null;
        first.forEach(send);
      });
    };
    document.body.appendChild(frame);
    return worker;
  };
}());
