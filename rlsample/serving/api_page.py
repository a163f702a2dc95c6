"""The page that shows openapi.json: plain HTML, nothing fetched but that file."""

from __future__ import annotations

__all__ = ["API_PAGE"]

API_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>rlsample: HTTP calls</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
code, pre { font: 13px/1.4 ui-monospace, monospace; background: #f4f4f4; border-radius: 4px; padding: 1px 4px }
pre { padding: 8px; overflow: auto } summary { cursor: pointer; padding: 6px 0 } b { display: inline-block; width: 4em }
</style>
<h1>rlsample: HTTP calls</h1><p id="about">Reading openapi.json</p><div id="calls"></div>
<script>
const add = (parent, tag, text) => parent.appendChild(Object.assign(document.createElement(tag), {textContent: text}));
fetch("openapi.json").then(r => r.json()).then(api => {
  document.getElementById("about").textContent = api.info.description;
  const calls = document.getElementById("calls");
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, call] of Object.entries(methods)) {
      const box = calls.appendChild(document.createElement("details"));
      const head = add(box, "summary", "");
      add(head, "b", method.toUpperCase()); add(head, "code", path); head.append(" " + call.summary);
      if (call.description) add(box, "p", call.description);
      const body = call.requestBody && call.requestBody.content["application/json"];
      if (body) { add(box, "div", "Body"); add(box, "pre", JSON.stringify(body.schema, null, 2)); }
      for (const [status, answer] of Object.entries(call.responses)) {
        add(box, "div", status + ": " + (answer.description || answer.$ref));
        const content = answer.content && answer.content["application/json"];
        if (content && content.schema && !content.schema.$ref) add(box, "pre", JSON.stringify(content.schema, null, 2));
      }
    }
}).catch(error => { document.getElementById("about").textContent = "openapi.json cannot be read: " + error; });
</script></html>
"""
