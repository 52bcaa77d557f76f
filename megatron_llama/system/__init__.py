"""What the operating system gives: exit statuses, signals, errors that end a program, files written whole."""
