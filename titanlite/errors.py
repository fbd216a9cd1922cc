"""The one exception that means: the user can mend this."""


class UserError(ValueError):
    """A fault in what the user gave: a key, a file, a model module, a mesh that the machine cannot hold.

    Its text names what is wrong, what is allowed and, where it can be guessed, what was meant. Commands print the
    text without a traceback and exit with code 2. Everything else that is raised is a defect of titanlite.
    """
