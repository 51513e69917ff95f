"""DiLoCo: replicas that train independently and synchronise every few steps, through an object store.

Each replica takes H inner steps by itself, and offers how far it went (the pseudo-gradient, global weights minus its
own). A round's offers are averaged, an outer optimiser with Nesterov momentum makes one step of the average, and all
replicas go on from there: Douillard et al. 2023 (arXiv 2311.08105), in fragments as in Streaming DiLoCo (arXiv
2501.18512). All replicas hold the same bytes after each round, whatever happened on the way.

settings.py - the setting `diloco`, and warnings about its values
arrays.py - weights as float32 arrays: fragments, the outer step, the codec, sealed bytes
rounds.py - rounds in an object store (publish, poll_round, reduce, latest), replica numbers, settings that all share
loop.py - one replica: inner steps, rounds, catching up
"""
