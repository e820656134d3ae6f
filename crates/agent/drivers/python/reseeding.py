# Numbers nobody else shall have.

SYSTEM_SEED = 64  # bits; numpy takes 128 from the system for a generator that is given no seed, and people give fewer


def stir_openssl():
    """OpenSSL's generator starts anew by itself in a process with another pid, and a process that comes back has its old one."""
    sys.modules["_ssl"].RAND_add(posix.urandom(64), 64.0)


def stir_generators():
    """Those that `numpy.random.default_rng()` has made. One that was given a seed is meant to go on as it would have."""
    from gc import get_objects

    numpy = sys.modules["numpy.random"]
    kinds = [getattr(numpy, name, None) for name in ("PCG64", "PCG64DXSM", "Philox", "SFC64")]
    known = {id(kind): kind for kind in kinds if kind is not None}  # not by `==`, which may be user code's
    for it in get_objects():
        kind = known.get(id(type(it)))
        if kind is None:
            continue
        sequence = it.seed_seq if hasattr(it, "seed_seq") else it._seed_seq
        entropy = getattr(sequence, "entropy", None)
        if type(entropy) is int and entropy.bit_length() > SYSTEM_SEED:
            it.state = kind().state
