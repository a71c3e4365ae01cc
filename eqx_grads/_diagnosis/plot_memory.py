def plot_memory(*a,**k): pass
