// "Words at a spot" shows its table below its inputs: ComfyUI's page shows text of its own nodes alone.
import { app } from "../../scripts/app.js";

app.registerExtension({
  name: "sdattn.WordsAtSpot",

  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== "SdattnWordsAtSpot") return;

    const onNodeCreated = nodeType.prototype.onNodeCreated;
    nodeType.prototype.onNodeCreated = function (...given) {
      onNodeCreated?.apply(this, given);
      const table = document.createElement("textarea");
      table.className = "comfy-multiline-input";
      table.readOnly = true;
      table.placeholder = "The words of the spot, once the graph has run";
      // Neither saved with the graph nor sent with it: other widgets keep their places.
      const options = { serialize: false, getMinHeight: () => 120 };
      this.addDOMWidget("table", "sdattn-table", table, options).serialize = false;
    };

    const onExecuted = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (output, ...given) {
      onExecuted?.apply(this, [output, ...given]);
      const shown = this.widgets.find((widget) => widget.name === "table");
      shown.element.value = (output?.text ?? []).join("\n");
    };
  },
});
