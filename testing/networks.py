"""Reference networks from their papers: float64 NumPy, row by row, without the code under test.

Each function takes the dense parameters by their `state_dict` names, and the normalised values [D]
and vectors [F, E] of one row. Each function returns the logit.
"""

import numpy as np

from evergreen.config.model import NETWORKS, NetworkConfig


def shaped(kind: str, settings, **widths) -> NetworkConfig:
    """Return the configuration of a network of kind `kind` with `settings` and `widths`."""
    return NETWORKS[kind](**settings, **widths)


def vectors_of(tables, positions, ids):
    """Return the vectors of rows with ids [n, positions], in the order of a network's inputs.

    Lists are summed or averaged over their filled positions. The vector of a list is at the
    position of the list.

    Args:
        tables: The table of each slot.

    Returns: An array [n, width] for each vector.
    """
    ends = {each.start: each for each in positions.lists}
    found, at = [], 0
    while at < len(positions.slots):
        start, stop, pool = ends.get(at, (at, at + 1, None))
        ids_here = ids[:, start:stop]
        filled = (ids_here != 0)[:, :, None] | (pool is None)
        total = (tables[positions.slots[at]].astype(np.float64)[ids_here] * filled).sum(1)
        found.append(total / filled.sum(1).clip(1) if pool == "mean" else total)
        at = stop
    return found


def logits(config, dense_parameters, dense, embeddings):
    """Compute logits [n] from normalised values [n, D] and vectors [n, F, E]."""
    of_row = {"dcn": _dcn, "deepfm": _deepfm, "dlrm": _dlrm}[config.network]
    p = {name: values.astype(np.float64) for name, values in dense_parameters.items()}
    rows = zip(dense.astype(np.float64), embeddings.astype(np.float64))
    return np.array([of_row(config, p, *row) + p["bias"][0] for row in rows])


def _tower(p, name, widths, x):
    for i in range(len(widths)):
        x = np.maximum(p[f"{name}.{3 * i}.weight"] @ x + p[f"{name}.{3 * i}.bias"], 0)
    return x


def _dcn(config, p, values, vectors):
    x0 = np.concatenate([vectors.ravel(), values])
    x = x0
    for layer in range(config.num_cross_layers):
        if config.projection_dim:
            x = x0 * (x @ p["cross_u"][layer] @ p["cross_v"][layer] + p["cross_bias"][layer]) + x
        else:
            x = x0 * (x @ p["cross_weight"][layer]) + x + p["cross_bias"][layer]
    return p["final_tower"][0] @ _tower(p, "tower", config.tower, x0) + p["final_cross"][0] @ x


def _deepfm(config, p, values, vectors):
    first_order = vectors[:, 0].sum() + (p["first_order.weight"][0] @ values if len(values) else 0)
    fields = [
        *vectors[:, 1:],
        *(value * factors for value, factors in zip(values, p["dense_factors"])),
    ]
    pairs = sum(one @ other for i, one in enumerate(fields) for other in fields[:i])
    deep = _tower(p, "tower", config.tower, np.concatenate([vectors[:, 1:].ravel(), values]))
    return first_order + pairs + p["final.weight"][0] @ deep


def _dlrm(config, p, values, vectors):
    bottom = (
        [_tower(p, "bottom", [config.tower[-1], config.embedding_dim], values)]
        if len(values)
        else []
    )
    all_vectors = [*bottom, *vectors]
    products = [one @ other for i, one in enumerate(all_vectors) for other in all_vectors[:i]]
    return p["final.weight"][0] @ _tower(
        p, "tower", config.tower, np.concatenate([*bottom, products])
    )
