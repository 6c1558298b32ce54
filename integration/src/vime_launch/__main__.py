from vime_launch.cli import main

raise SystemExit(main())
