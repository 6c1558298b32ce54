from vime_buffer.cli import main

if __name__ == "__main__":
    main()
