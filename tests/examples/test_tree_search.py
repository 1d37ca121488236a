"""Monte-Carlo tree search inside one jit: every node is a row of the cache and shares the pages of its path."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from paged_jax import PagedCache, append, fork, release, usage
from tests.examples import numpy_model
from tests.examples.own_model import OwnModel, Params, init_params, layout

MODEL = OwnModel()
EXPLORATION = 2.0


class Tree(NamedTuple):
    """Node i is row i of the cache; node 0, the root, is the prompt. Arrays are [nodes] or [nodes, vocab_size]."""

    children: Array  # node that an action leads to, -1 if not visited yet
    parents: Array
    actions: Array  # token that led here
    priors: Array  # the model's probabilities of the next token
    visits: Array
    values: Array  # sums of all values found at and below the node


def value_of(hidden: Array) -> Array:
    """How good a sequence is, from its last hidden state: stands for a value head of yours."""
    return jnp.tanh(hidden[0])


def scores(tree: Tree, node: Array) -> Array:
    """PUCT (Silver et al. 2017, methods): a child's mean value, and its prior while it has few visits."""
    children = tree.children[node]
    visits = jnp.where(children < 0, 0.0, tree.visits[children])
    mean = jnp.where(children < 0, 0.0, tree.values[children]) / jnp.maximum(visits, 1)
    return mean + EXPLORATION * tree.priors[node] * jnp.sqrt(tree.visits[node]) / (1 + visits)


@partial(jax.jit, static_argnames="simulations")
def search(params: Params, cache: PagedCache, prompt: Array, simulations: int) -> tuple[Tree, PagedCache, Array]:
    """Grows a tree by one node a simulation, in an (empty) cache of at least simulations + 1 rows."""
    max_nodes, vocab_size = cache.tables.seq_lens.shape[0], params["head"].shape[0]

    def evaluate(cache: PagedCache, node: Array, token_ids: Array) -> tuple[PagedCache, Array, Array, Array]:
        """Appends tokens to one row; priors of the next and the value."""
        counts = jnp.zeros(max_nodes, jnp.int32).at[node].set(token_ids.shape[0])
        cache, batch, ok = append(cache, counts, num_tokens=token_ids.shape[0])
        hidden, kv = MODEL(params, token_ids, batch, cache.kv)
        priors = jax.nn.softmax(MODEL.logits(params, hidden[-1:])[0])
        return replace(cache, kv=kv), priors, value_of(hidden[-1]), ok

    def descend(tree: Tree) -> tuple[Array, Array]:
        """From the root along the best scores to an action that has no node yet."""

        def best(node: Array) -> tuple[Array, Array]:
            return node, jnp.argmax(scores(tree, node)).astype(jnp.int32)

        return lax.while_loop(
            lambda edge: tree.children[edge] >= 0, lambda edge: best(tree.children[edge]), best(jnp.int32(0))
        )

    def back_up(tree: Tree, node: Array, value: Array) -> Tree:
        def climb(carry: tuple[Tree, Array]) -> tuple[Tree, Array]:
            tree, node = carry
            tree = tree._replace(visits=tree.visits.at[node].add(1), values=tree.values.at[node].add(value))
            return tree, tree.parents[node]

        return lax.while_loop(lambda carry: carry[1] >= 0, climb, (tree, node))[0]

    def simulate(new: Array, carry: tuple[Tree, PagedCache, Array]) -> tuple[Tree, PagedCache, Array]:
        tree, cache, ok = carry
        node, action = descend(tree)
        cache = fork(cache, node[None], new[None])  # the new node shares every page of its path ...
        cache, priors, value, fits = evaluate(cache, new, action[None])  # ... but the one it writes to
        tree = tree._replace(
            children=tree.children.at[node, action].set(new),
            parents=tree.parents.at[new].set(node),
            actions=tree.actions.at[new].set(action),
            priors=tree.priors.at[new].set(priors),
        )
        return back_up(tree, new, value), cache, ok & fits

    nowhere = jnp.full(max_nodes, -1, jnp.int32)
    cache, priors, value, ok = evaluate(cache, jnp.int32(0), prompt)
    tree = Tree(
        children=jnp.full((max_nodes, vocab_size), -1, jnp.int32),
        parents=nowhere,
        actions=nowhere,
        priors=jnp.zeros((max_nodes, vocab_size)).at[0].set(priors),
        visits=jnp.zeros(max_nodes),
        values=jnp.zeros(max_nodes),
    )
    return lax.fori_loop(1, simulations + 1, simulate, (back_up(tree, jnp.int32(0), value), cache, ok))


def uncached(params: Params, prompt: Sequence[int], simulations: int) -> dict[tuple[int, ...], tuple[int, float]]:
    """The same in Python and NumPy, computing every node from its first token on: path -> (visits, sum of values).
    The best score of every choice must lie further from the others than rounding takes them."""
    nodes: dict[tuple[int, ...], list] = {}  # path -> [priors, visits, sum of values]

    def score(path: tuple[int, ...], action: int) -> tuple[float, float]:
        """A score, and how far rounding may take it: priors move by a log-probability's error times themselves."""
        priors, total, _ = nodes[path]
        _, visits, values = nodes.get((*path, action), (None, 0, 0.0))
        exploration = EXPLORATION * priors[action] * np.sqrt(total) / (1 + visits)
        return values / max(visits, 1) + exploration, (1 + exploration) * numpy_model.log_prob_bound(params)

    for simulation in range(simulations + 1):
        path: tuple[int, ...] = ()
        while simulation and path in nodes:
            all_scores, errors = np.transpose([score(path, action) for action in range(len(params["head"]))])
            best = int(np.argmax(all_scores))
            others = np.delete(all_scores + errors, best)
            assert all_scores[best] - errors[best] > others.max()
            path = (*path, best)
        value = np.tanh(numpy_model.hidden_states(params, [*prompt, *path])[-1, 0])
        nodes[path] = [np.exp(numpy_model.log_probs(params, [*prompt, *path])[-1]), 0, 0.0]
        for length in range(len(path) + 1):
            nodes[path[:length]][1] += 1
            nodes[path[:length]][2] += value
    return {path: (visits, values) for path, (_, visits, values) in nodes.items()}


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """The tokens that lead from the root to each node."""
    found: list[tuple[int, ...]] = [()]
    for parent, action in zip(tree.parents[1:].tolist(), tree.actions[1:].tolist(), strict=True):
        found.append((*found[parent], action))
    return found


def test_tree_search() -> None:
    params = init_params(seed=12, vocab_size=8)
    prompt, simulations = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5], 24
    cache = PagedCache.create(layout(num_pages=64), max_seqs=simulations + 1, pages_per_seq=8)
    tree, cache, ok = search(params, cache, jnp.array(prompt, jnp.int32), simulations)
    tree = jax.device_get(tree)
    expected = uncached(params, prompt, simulations)

    assert ok
    assert paths(tree) == list(expected)
    assert max(map(len, expected)) > layout(2).page_size, "deep enough to fill a page and begin another"
    assert tree.visits.tolist() == [visits for visits, _ in expected.values()]
    atol = simulations * numpy_model.log_prob_bound(params)
    np.testing.assert_allclose(tree.values, [values for _, values in expected.values()], rtol=0, atol=atol)

    shared = int(usage(cache)["live"])
    alone = sum(cache.layout.pages_for(len(prompt) + len(path)) for path in expected)
    assert (shared, alone) == (27, 89)
    assert int(release(cache, jnp.ones(simulations + 1, bool)).pool.num_free) == cache.layout.num_pages - 1
    print(f"{shared} pages hold the tree; {alone} would be needed if each node had its own")
