"""Tasks in Harbor's folder format, played in a container or, where they need only a Python and files, in bubblewrap.

task_folder.py - task folders: read, validate, and name every reason why one cannot be used
"""
