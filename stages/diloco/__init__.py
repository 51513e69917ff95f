"""DiLoCo: replicas that train independently and synchronise every few steps, through a bucket or in one process.

Each replica takes H inner steps by itself, and offers how far it went (the pseudo-gradient, global weights minus its
own). A round's offers are averaged, an outer optimiser with Nesterov momentum makes one step of the average, and all
replicas go on from there: Douillard et al. 2023 (arXiv 2311.08105), in fragments as in Streaming DiLoCo (arXiv
2501.18512). All replicas hold the same bytes after each round, whatever happened on the way.

settings.py - the setting `diloco`, and warnings about its values
arrays.py - weights as float32 arrays: fragments, the outer step, the codec, sealed bytes
transport.py - the protocol between replicas (publish, poll_round, reduce, latest), and its reference within one process
object_store.py - rounds in a bucket, replica numbers, the settings that all replicas share
lighthouse.py - rounds over torchft's lighthouse, directly between replicas that share a secret
loop.py - one replica: inner steps, rounds, catching up
"""
