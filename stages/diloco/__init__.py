"""DiLoCo: replicas that train apart and meet every few steps, through a bucket or in one process.

Each replica takes H inner steps by itself, and offers how far it went (the pseudo-gradient, global weights minus its
own). A round's offers are averaged, an outer optimiser with Nesterov momentum makes one step of the average, and all
replicas go on from there: Douillard et al. 2023 (arXiv 2311.08105), in fragments as in Streaming DiLoCo (arXiv
2501.18512). All replicas hold the same bytes after each round, whatever happened on the way.

settings.py - the setting `diloco`, and what is odd about its values
arrays.py - weights by name as float32 arrays: copies, a digest, fragments
outer.py - the pseudo-gradient and the outer step, equal to PyTorch's SGD with Nesterov momentum
codec.py - arrays as float32, bfloat16, int8 or int4, and what rounding lost
sealed.py - bytes with a digest in front, so that a damaged object is known as one
transport.py - what replicas say to each other: publish, commit, reduce, latest
in_process.py - the same within one process, which others are held against
object_store.py - rounds in a bucket: who is in, their mean, the newest state
lighthouse.py - rounds over torchft's lighthouse, from replica to replica
secret.py - how they prove to each other there that they belong together
served_objects.py - what one replica serves to the others there
joining.py - a replica's number, and the settings that all replicas share
loop.py - one replica: inner steps counted, rounds taken part in, others caught up with
"""
