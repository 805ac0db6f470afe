"""The options that commands share: each group is a dataclass that declares its flags once and is passed on whole.

A group checks that its values make sense together and turns them into what the other rooms take. It must not know
which command it is used in.
"""
