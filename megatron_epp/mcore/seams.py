CPU_HOST_SEAMS = ()
def install(s): 
    import megatron.training.training
