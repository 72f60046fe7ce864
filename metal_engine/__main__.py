from metal_engine.cli.main import main

if __name__ == "__main__":
    main()
