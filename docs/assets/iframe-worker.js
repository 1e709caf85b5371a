// Search needs a Web Worker, and browsers refuse to start one for a page that was opened from disk. There, this runs the
// worker's script in a hidden frame instead. (mkdocs-material's offline plugin would fetch such a script from a CDN; it
// leaves that out where it finds one with "iframe-worker" in its name.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.documentElement.appendChild(this.frame)
      const scope = this.frame.contentWindow
      scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = scope.document.createElement("script")
      script.src = new URL(url, document.baseURI)
      this.ready = new Promise(resolve => { script.onload = resolve })
      scope.document.body.appendChild(script)
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
