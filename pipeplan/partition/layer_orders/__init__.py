"""In which order do the layers of a DAG stand best?"""
