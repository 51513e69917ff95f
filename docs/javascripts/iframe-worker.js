// Search without a server. Pages opened from a folder may not start web workers, so the search runs in a hidden frame that
// looks like one. The site's theme would fetch such a script from a CDN; docs/pages.py puts this one in its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      this.ready = new Promise((resolve) => { this.frame.onload = resolve; });
      window.addEventListener("message", (event) => {
        if (event.source !== this.frame.contentWindow) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      const inside = this.frame.contentWindow.document;
      inside.open();
      inside.write(
        "<script>" +
          "self.postMessage = (data) => parent.postMessage(data, '*');" +
          "self.importScripts = (...urls) => Promise.all(urls.map((url) => new Promise((resolve, reject) => {" +
          "const script = document.createElement('script'); script.src = url; script.onload = resolve;" +
          "script.onerror = reject; document.body.appendChild(script); })));" +
          "</" + "script><script src='" + url + "'></" + "script>"
      );
      inside.close();
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
