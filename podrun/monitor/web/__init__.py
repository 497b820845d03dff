"""The live view in a browser: one page (`page.html`), served on loopback with a token, fed by server-sent events."""
