"""`tamis inspect`: a document's stored bits as a picture."""

from __future__ import annotations

import json as jsonlib
import re
from typing import TYPE_CHECKING, Annotated

import typer

from tamis.cli.options import Device, Dtype, Json, Model, Store, Yarn, load
from tamis.core.errors import InvalidInput, Unavailable

if TYPE_CHECKING:
    from tamis.index.encode import Bits

FULL, EMPTY = "█", "·"
PASSAGE_ID = re.compile("[0-9a-fA-F]{32}")


def inspect(
    doc: Annotated[str, typer.Argument(help="A text file (all of it is one document), or a passage id of the store.")],
    layer: Annotated[int, typer.Option(help="Layer number.")] = 0,
    head: Annotated[int, typer.Option(help="Query head number.")] = 0,
    model: Model = "smollm2",
    store: Store = None,
    png: Annotated[str | None, typer.Option("--png", help="Draw all heads of the layer into this file.")] = None,
    alpha: Annotated[float, typer.Option(help="Threshold of the LA bits.")] = 0.001,
    device: Device = None,
    dtype: Dtype = None,
    yarn: Yarn = None,
    json: Json = False,
) -> None:
    """Show DOC's LA bits (rows look at columns) and CA bits (pages that other documents look at)."""
    from pathlib import Path

    from tamis.corpus import read_file
    from tamis.engine.knowledge import default_store

    with load(model, device, dtype, yarn, alpha=alpha) as llm:
        shape = llm.runner.geometry
        for name, number, count in (("layer", layer, shape.n_layers), ("head", head, shape.n_heads)):
            if not 0 <= number < count:
                raise InvalidInput(f"{name} is {number}; this model has {name}s 0 to {count - 1}.")
        with llm.corpus(store or default_store(llm.spec(llm.policy))) as base:
            if Path(doc).exists():
                text = read_file(Path(doc))
                tokens = llm.template.document_tokens(text.title, text.text)
            else:
                passage = base.corpus.get(doc) if PASSAGE_ID.fullmatch(doc) else None
                if passage is None:
                    raise InvalidInput(f"{doc} is neither a file nor a passage of the store; see tamis index --list.")
                tokens = base.tokens(passage)
            base.indexer.index([tokens])
            record = base.indexer.records([tokens])[0]
    assert record is not None, "it was just made"
    bits = record.bits()
    if png:
        _draw(bits, layer, png, f"{Path(doc).name}, layer {layer}")
    la, ca = bits.la[layer, head].int().tolist(), bits.ca[layer, head].int().tolist()
    shown = {
        "tokens": len(tokens),
        "tiles": bits.n_pages,
        "layer": layer,
        "head": head,
        "la": la,
        "ca": ca,
        "la_share_of_layer": _share(bits, layer),
        "ca_share_of_layer": float(bits.ca[layer].float().mean()),
    }
    if json:
        print(jsonlib.dumps(shown))
        return
    print(f"{len(tokens)} tokens, {bits.n_pages} tiles of {record.tile}; layer {layer}, head {head}")
    for i, row in enumerate(la):
        print("  " + "".join(FULL if b else EMPTY for b in row[: i + 1]))
    print("CA " + "".join(FULL if b else EMPTY for b in ca))
    print(f"kept in this layer, all heads: LA {shown['la_share_of_layer']:.2f}, CA {shown['ca_share_of_layer']:.2f}")


def _share(bits: Bits, layer: int) -> float:
    pages = bits.n_pages
    heads = bits.ca.shape[1]
    return float(bits.la[layer].sum()) / (heads * pages * (pages + 1) / 2)


def _draw(bits: Bits, layer: int, path: str, title: str) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as e:
        raise Unavailable('--png needs matplotlib: pip install "tamis[plots]".') from e
    heads = bits.ca.shape[1]
    columns = min(heads, 8)
    rows = -(-heads // columns)
    figure, axes = pyplot.subplots(rows, columns, squeeze=False, figsize=(1.6 * columns, 1.9 * rows + 0.4))
    for h, axis in enumerate(axes.flat):
        axis.axis("off")
        if h < heads:
            picture = bits.la[layer, h].float()
            # the page bits stand as one more row under the triangle, after a gap
            gap = picture.new_full((1, picture.shape[1]), 0.5)
            axis.imshow(
                [*picture.tolist(), *gap.tolist(), bits.ca[layer, h].float().tolist()], cmap="Blues", vmin=0, vmax=1
            )
            axis.set_title(f"head {h}", fontsize=7)
    figure.suptitle(f"{title}: LA bits (triangle) and CA bits (last row)", fontsize=9)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
