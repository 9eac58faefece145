// The search of the theme runs in a worker, and browsers start none for a page that was opened from a folder. There a frame
// of the page stands in for it: what the worker's script posts and listens to is tied to an object with a worker's methods.
// Pages from a server are left alone. The name is the one that mkdocs-material's offline plugin looks for.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const room = frame.contentWindow
      // What comes before the script is there waits for it.
      this.ready = new Promise((resolve, reject) => {
        const load = (url) =>
          new Promise((done, failed) => {
            const script = room.document.createElement("script")
            script.src = url
            script.onload = done
            script.onerror = () => failed(new Error(`${url} was not read`))
            room.document.body.appendChild(script)
          })
        room.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
        // A worker's importScripts waits; its script awaits the last one, so that each begins when the one before is there.
        room.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => load(url)), Promise.resolve())
        load(address).then(resolve, reject)
      })
      this.room = room
      this.frame = frame
    }
    postMessage(data) {
      this.ready.then(() => this.room.dispatchEvent(new this.room.MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
